"""The same few calls in each library, written as its own documentation would.

Every library uses one collection of one database, with the server's default
write concern, so that reads see the same documents and writes cost the server
the same. A library that is not installed is left out.
"""

# No postponed annotations here: ODMantic reads them at class creation.
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import pydantic
from bson import ObjectId
from pydantic import BaseModel, InstanceOf
from pymongo import AsyncMongoClient, MongoClient, ReturnDocument

import treadle
from benchmarks.harness import Context

DATABASE = "treadle_benchmarks"
COLLECTION = "people"

Raw = dict[str, Any]


class Library(ABC):
    """A blocking library, connected."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, raw: Raw) -> Any:
        """What the library's user would hold for this stored document."""

    def plain(self, document: Any) -> Raw:
        """The stored document again, to check that all libraries did the same."""
        values: Raw = document.model_dump()
        return {"_id": values.pop("id"), **values}

    @abstractmethod
    def insert(self, document: Any) -> Any: ...

    @abstractmethod
    def insert_many(self, documents: Sequence[Any]) -> Any: ...

    @abstractmethod
    def get(self, identity: ObjectId) -> Any: ...

    @abstractmethod
    def find(self) -> list[Any]: ...


class AsyncLibrary(ABC):
    """An asyncio library, connected; `build` and `plain` as in `Library`."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, raw: Raw) -> Any: ...

    def plain(self, document: Any) -> Raw:
        values: Raw = document.model_dump()
        return {"_id": values.pop("id"), **values}

    @abstractmethod
    async def insert(self, document: Any) -> Any: ...

    @abstractmethod
    async def insert_many(self, documents: Sequence[Any]) -> Any: ...

    @abstractmethod
    async def get(self, identity: ObjectId) -> Any: ...

    @abstractmethod
    async def update(self, identity: ObjectId) -> Any:
        """One more visit; the document after it."""

    @abstractmethod
    async def find(self) -> list[Any]: ...


# -- PyMongo -----------------------------------------------------------------


class PyMongo(Library):
    name = "PyMongo, dicts"

    def __init__(self, client: MongoClient[Raw]) -> None:
        self.collection = client[DATABASE][COLLECTION]

    def build(self, raw: Raw) -> Raw:
        return raw

    def plain(self, document: Raw) -> Raw:
        return document

    def insert(self, document: Raw) -> Any:
        return self.collection.insert_one(document)

    def insert_many(self, documents: Sequence[Raw]) -> Any:
        return self.collection.insert_many(documents)

    def get(self, identity: ObjectId) -> Raw | None:
        return self.collection.find_one({"_id": identity})

    def find(self) -> list[Raw]:
        return list(self.collection.find({}))


class PyMongoToList(PyMongo):
    """The fastest read by hand: the cursor hands over whole batches."""

    name = "PyMongo, dicts, to_list()"

    def find(self) -> list[Raw]:
        return self.collection.find({}).to_list()


class Address(BaseModel):
    street: str
    city: str
    zip_code: str


class PlainPerson(BaseModel):
    id: InstanceOf[ObjectId] = pydantic.Field(alias="_id")
    name: str
    email: str
    address: Address
    age: int
    visits: int
    score: float
    active: bool
    tags: list[str]


class PyMongoPydantic(Library):
    name = "PyMongo + Pydantic"

    def __init__(self, client: MongoClient[Raw]) -> None:
        self.collection = client[DATABASE][COLLECTION]

    def build(self, raw: Raw) -> PlainPerson:
        return PlainPerson.model_validate(raw)

    def insert(self, document: PlainPerson) -> Any:
        return self.collection.insert_one(document.model_dump(by_alias=True))

    def insert_many(self, documents: Sequence[PlainPerson]) -> Any:
        return self.collection.insert_many([document.model_dump(by_alias=True) for document in documents])

    def get(self, identity: ObjectId) -> PlainPerson | None:
        raw = self.collection.find_one({"_id": identity})
        return None if raw is None else PlainPerson.model_validate(raw)

    def find(self) -> list[PlainPerson]:
        return [PlainPerson.model_validate(raw) for raw in self.collection.find({})]


class PyMongoBoundPydantic(PyMongoPydantic):
    """The fastest validated read by hand."""

    name = "PyMongo + Pydantic, bound validator"

    def find(self) -> list[PlainPerson]:
        validate = PlainPerson.__pydantic_validator__.validate_python
        return [validate(raw) for raw in self.collection.find({})]


class AsyncPyMongo(AsyncLibrary):
    name = "PyMongo async, dicts"

    def __init__(self, client: AsyncMongoClient[Raw]) -> None:
        self.collection = client[DATABASE][COLLECTION]

    def build(self, raw: Raw) -> Raw:
        return raw

    def plain(self, document: Raw) -> Raw:
        return document

    async def insert(self, document: Raw) -> Any:
        return await self.collection.insert_one(document)

    async def insert_many(self, documents: Sequence[Raw]) -> Any:
        return await self.collection.insert_many(documents)

    async def get(self, identity: ObjectId) -> Raw | None:
        return await self.collection.find_one({"_id": identity})

    async def update(self, identity: ObjectId) -> Raw | None:
        one_more = {"$inc": {"visits": 1}}
        return await self.collection.find_one_and_update(
            {"_id": identity}, one_more, return_document=ReturnDocument.AFTER
        )

    async def find(self) -> list[Raw]:
        return await self.collection.find({}).to_list()


class PyMongoAllOrNone(PyMongo):
    """The same, with an `insert_many` that stores all documents or none, as Treadle's does."""

    name = "PyMongo, dicts, in one transaction"

    def insert_many(self, documents: Sequence[Raw]) -> Any:
        with self.collection.database.client.start_session() as session:
            return session.with_transaction(
                lambda session: self.collection.insert_many(documents, session=session)
            )


class AsyncPyMongoAllOrNone(AsyncPyMongo):
    name = "PyMongo async, dicts, in one transaction"

    async def insert_many(self, documents: Sequence[Raw]) -> Any:
        async with self.collection.database.client.start_session() as session:
            return await session.with_transaction(
                lambda session: self.collection.insert_many(documents, session=session)
            )


def _by_hand(person: PlainPerson) -> Raw:
    return {
        "_id": person.id,
        "name": person.name,
        "email": person.email,
        "address": {
            "street": person.address.street,
            "city": person.address.city,
            "zip_code": person.address.zip_code,
        },
        "age": person.age,
        "visits": person.visits,
        "score": person.score,
        "active": person.active,
        "tags": person.tags,
    }


class PyMongoByHand(PyMongoAllOrNone):
    """The least that inserting models, all or none, can cost: each as the dict that one writes for it."""

    name = "PyMongo, models as dicts by hand, in one transaction"

    def build(self, raw: Raw) -> Any:
        return PlainPerson.model_validate(raw)

    def insert_many(self, documents: Sequence[Any]) -> Any:
        return super().insert_many([_by_hand(document) for document in documents])


class AsyncPyMongoByHand(AsyncPyMongoAllOrNone):
    name = "PyMongo async, models as dicts by hand, in one transaction"

    def build(self, raw: Raw) -> Any:
        return PlainPerson.model_validate(raw)

    async def insert_many(self, documents: Sequence[Any]) -> Any:
        return await super().insert_many([_by_hand(document) for document in documents])


# -- Treadle -----------------------------------------------------------------


class Person(treadle.Document, collection=COLLECTION):
    name: str
    email: str
    address: Address
    age: int
    visits: int
    score: float
    active: bool
    tags: list[str]


class Treadle(Library):
    name = "Treadle Store"

    def __init__(self, client: MongoClient[Raw]) -> None:
        self.store = treadle.Store(client[DATABASE], models=[Person])

    def build(self, raw: Raw) -> Person:
        return Person.model_validate(raw)

    def insert(self, document: Person) -> Any:
        return self.store.insert(document)

    def insert_many(self, documents: Sequence[Person]) -> Any:
        return self.store.insert_many(documents)

    def get(self, identity: ObjectId) -> Person | None:
        return self.store.get(Person, identity)

    def find(self) -> list[Person]:
        return list(self.store.find(Person))


class AsyncTreadle(AsyncLibrary):
    name = "Treadle AsyncStore"

    def __init__(self, client: AsyncMongoClient[Raw]) -> None:
        self.store = treadle.AsyncStore(client[DATABASE], models=[Person])

    def build(self, raw: Raw) -> Person:
        return Person.model_validate(raw)

    async def insert(self, document: Person) -> Any:
        return await self.store.insert(document)

    async def insert_many(self, documents: Sequence[Person]) -> Any:
        return await self.store.insert_many(documents)

    async def get(self, identity: ObjectId) -> Person | None:
        return await self.store.get(Person, identity)

    async def update(self, identity: ObjectId) -> Person | None:
        return await self.store.update(Person, identity, {"$inc": {"visits": 1}})

    async def find(self) -> list[Person]:
        return await self.store.find(Person).to_list()


# -- the ODMs ------------------------------------------------------------------


def odmantic(client: MongoClient[Raw]) -> Library:
    """ODMantic, whose save is an upsert; it has no plain insert."""
    from odmantic import EmbeddedModel, Model, SyncEngine

    class OdmanticAddress(EmbeddedModel):
        street: str
        city: str
        zip_code: str

    class OdmanticPerson(Model):
        model_config = {"collection": COLLECTION}

        name: str
        email: str
        address: OdmanticAddress
        age: int
        visits: int
        score: float
        active: bool
        tags: list[str]

    class Odmantic(Library):
        name = "ODMantic"

        def __init__(self) -> None:
            self.engine = SyncEngine(client, database=DATABASE)

        def build(self, raw: Raw) -> Any:
            values = {key: value for key, value in raw.items() if key != "_id"}
            values["address"] = OdmanticAddress(**raw["address"])
            return OdmanticPerson(id=raw["_id"], **values)

        def insert(self, document: Any) -> Any:
            return self.engine.save(document)

        def insert_many(self, documents: Sequence[Any]) -> Any:
            return self.engine.save_all(documents)

        def get(self, identity: ObjectId) -> Any:
            return self.engine.find_one(OdmanticPerson, OdmanticPerson.id == identity)

        def find(self) -> list[Any]:
            return list(self.engine.find(OdmanticPerson))

    return Odmantic()


def mongoengine(context: Context) -> Library:
    """MongoEngine, with the arguments that spare it extra commands."""
    import mongoengine as me  # type: ignore[import-untyped]

    me.connect(DATABASE, host=context.uri, uuidRepresentation="standard")
    context.stack.callback(me.disconnect)

    class EngineAddress(me.EmbeddedDocument):  # type: ignore[misc]
        street = me.StringField(required=True)
        city = me.StringField(required=True)
        zip_code = me.StringField(required=True)

    class EnginePerson(me.Document):  # type: ignore[misc]
        meta: ClassVar[Raw] = {"collection": COLLECTION}

        name = me.StringField(required=True)
        email = me.StringField(required=True)
        address = me.EmbeddedDocumentField(EngineAddress)
        age = me.IntField()
        visits = me.IntField()
        score = me.FloatField()
        active = me.BooleanField()
        tags = me.ListField(me.StringField())

    class MongoEngine(Library):
        name = "MongoEngine"

        def build(self, raw: Raw) -> Any:
            values = {key: value for key, value in raw.items() if key != "_id"}
            values["address"] = EngineAddress(**raw["address"])
            return EnginePerson(id=raw["_id"], **values)

        def plain(self, document: Any) -> Raw:
            return dict(document.to_mongo().to_dict())

        def insert(self, document: Any) -> Any:
            # Without force_insert it would first try to replace.
            return document.save(force_insert=True)

        def insert_many(self, documents: Sequence[Any]) -> Any:
            # With load_bulk it would read all of them back.
            return EnginePerson.objects.insert(documents, load_bulk=False)

        def get(self, identity: ObjectId) -> Any:
            return EnginePerson.objects.get(id=identity)

        def find(self) -> list[Any]:
            return list(EnginePerson.objects)

    return MongoEngine()


def beanie(client: AsyncMongoClient[Raw], context: Context) -> AsyncLibrary:
    """Beanie, on PyMongo's own asyncio client."""
    import beanie as odm

    class BeaniePerson(odm.Document):
        name: str
        email: str
        address: Address
        age: int
        visits: int
        score: float
        active: bool
        tags: list[str]

        class Settings:
            name = COLLECTION

    context.wait(odm.init_beanie(database=client[DATABASE], document_models=[BeaniePerson]))

    class Beanie(AsyncLibrary):
        name = "Beanie"

        def build(self, raw: Raw) -> Any:
            return BeaniePerson.model_validate(raw)

        def plain(self, document: Any) -> Raw:
            values = document.model_dump(exclude={"revision_id"})
            return {"_id": values.pop("id"), **values}

        async def insert(self, document: Any) -> Any:
            return await document.insert()

        async def insert_many(self, documents: Sequence[Any]) -> Any:
            return await BeaniePerson.insert_many(documents)

        async def get(self, identity: ObjectId) -> Any:
            return await BeaniePerson.get(identity)

        async def update(self, identity: ObjectId) -> Any:
            after = odm.UpdateResponse.NEW_DOCUMENT
            return await BeaniePerson.find_one({"_id": identity}).inc({"visits": 1}, response_type=after)

        async def find(self) -> list[Any]:
            return await BeaniePerson.find_all().to_list()

    return Beanie()


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def blocking(context: Context) -> list[Library]:
    """All blocking libraries, raw PyMongo first, on an empty collection."""
    client: MongoClient[Raw] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(DATABASE)
    context.stack.callback(client.drop_database, DATABASE)
    libraries: list[Library] = [PyMongo(client), PyMongoPydantic(client), Treadle(client)]
    if _installed("odmantic"):
        libraries.append(odmantic(client))
    if _installed("mongoengine"):
        libraries.append(mongoengine(context))
    return libraries


def asynchronous(context: Context) -> list[AsyncLibrary]:
    """All asyncio libraries, raw PyMongo first."""
    client: AsyncMongoClient[Raw] = AsyncMongoClient(context.uri)
    context.stack.callback(lambda: context.wait(client.close()))
    libraries: list[AsyncLibrary] = [AsyncPyMongo(client), AsyncTreadle(client)]
    if _installed("beanie"):
        libraries.append(beanie(client, context))
    return libraries
