"""Items of several kinds in one collection."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel

from treadle import Document, Indexed


class Item(Document, collection="items", discriminator="type"):
    title: Annotated[str, Indexed(text=3)]
    price: Decimal = Decimal(0)


class Media(Item):
    """Abstract: it has no kind of its own."""

    author: str = "unknown"


class Book(Media, kind="book"):
    isbn: Annotated[str | None, Indexed(unique=True)] = None
    pages: Annotated[int, Indexed()] = 0


class Comic(Book, kind="comic"):
    colours: set[str] = set()


class Electronics(Item, kind="electronics"):
    brand: Annotated[str, Indexed(text=True)]
    code: Annotated[str | None, Indexed(unique=True)] = None


class Voucher(Item, kind="voucher"):
    code: Annotated[str | None, Indexed(unique=True)] = None


MODELS = [Item, Media, Book, Comic, Electronics, Voucher]


class Customer(Document, collection="customers"):
    name: str


class CustomerCard(BaseModel):
    name: str
