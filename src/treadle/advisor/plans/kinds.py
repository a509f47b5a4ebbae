"""Which findings a plan applies, and which it leaves to the application, with the reason.

A pattern can be applied beside writers that know nothing of it if it adds
fields or indexes, follows the change stream, makes recorded requests quicker,
and can be taken back exactly. Everything else is named with its declaration:
it changes what programs read or write, or no figure can support it.
"""

from __future__ import annotations

# Why the application has to do it.
BY_APPLICATION = {
    "approximation": "It changes how the application counts, and nothing that is stored.",
    "attributes": "Whoever writes or searches these fields must use the array in their place.",
    "bloated-document": "It moves parts out of documents that others read whole.",
    "blobs": "It moves values out of documents that others read whole.",
    "bucket": "Readings become parts of other documents, in a collection that writers must write to.",
    "case-insensitive-search": "Its index serves only queries that name the collation, as programs must.",
    "deep-nesting": "It gives documents that others read and write another shape.",
    "history": "It makes no request quicker; add it to the application's models and run setup().",
    "huge-array": "It moves items out of documents that others read whole.",
    "links": "It moves documents of two collections into one, which every program must know of.",
    "mixed-types": "It converts values that other programs wrote as they are, and would write so again.",
    "no-validation": "It makes no request quicker; add it to the application's models and run setup().",
    "normalised-everything": "It moves documents into others, where every program must look for them.",
    "outlier": "It moves items out of documents that others read whole.",
    "polymorphic": "It changes how programs read and write these documents, and nothing that is stored.",
    "redundant-index": "An index that is dropped is built anew to take that back, under load.",
    "schema-versioning": "What its migrations do is for the team to write.",
    "too-many-collections": "It moves documents of many collections into one, where programs must look.",
    "too-many-indexes": "Which of them other programs need, nobody can tell from one recording.",
    "tree": "No worker follows a tree: a node that is moved past Treadle would leave its ancestors wrong.",
    "unused-index": "Which of them a monthly job needs, nobody can tell from one recording.",
}
NOT_TRIED = "It was not tried: --only names other findings."
