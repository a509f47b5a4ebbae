"""Random models: what is stored comes back as it was."""

from __future__ import annotations

from hypothesis import Phase, given, seed, settings

from tests.fuzz import rounds
from tests.support import models_with_documents
from treadle import Store


def test_documents_of_random_models_come_back(database):
    for number, chance in enumerate(rounds(1)):

        @seed(chance.randrange(2**32))
        @settings(max_examples=15, database=None, phases=[Phase.generate], derandomize=False)
        @given(models_with_documents(collection=f"things{number}"))
        def check(case):
            model, documents = case
            store = Store(database, [model])
            stored = store.insert_many(documents)
            assert [each.id for each in stored] == [each.id for each in documents]
            for document in stored:
                assert document == store.get(model, document.id)
            store.collection(model).drop()

        check()
