"""Which field refers to which collection: found, proven and counted; on a real server."""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId, Regex
from bson.decimal128 import Decimal128

from treadle.advisor import Limits, scan


def test_relations_are_proven_with_orphans_and_cardinalities(database: Any) -> None:
    database["customers"].insert_many([{"_id": ObjectId(), "email": f"e{n}@example.org"} for n in range(100)])
    database["customers"].create_index("email", unique=True)
    ids = [each["_id"] for each in database["customers"].find({}, {"_id": 1})]
    # 80 customers have 1 to 4 orders; 20 have none; 20 orders name nobody.
    owners = [ids[n] for n in range(80) for _ in range(1 + n % 4)] + [ObjectId() for _ in range(20)]
    database["orders"].insert_many(
        [
            {"buyer": each, "customer_email": f"e{n % 90}@example.org", "status": n % 3}
            for n, each in enumerate(owners)
        ]
    )
    found = {(each.child, each.path): each for each in scan(database).scan.relations}
    assert {("orders", "buyer"), ("orders", "customer_email")} == set(found)
    by_id, by_mail = found["orders", "buyer"], found["orders", "customer_email"]
    assert ("customers", "_id", "type") == (by_id.parent, by_id.key, by_id.found_by)
    assert (220, 20, 220) == (by_id.references, by_id.orphans, by_id.checked)
    # The orphans' own values count as parents of one.
    assert (1, 4, 20) == (by_id.children.minimum, by_id.children.maximum, by_id.childless)
    assert ("customers", "email", "name") == (by_mail.parent, by_mail.key, by_mail.found_by)
    assert 0 == by_mail.orphans


def test_children_of_a_large_collection_come_from_drawn_references(database: Any) -> None:
    """999 customers have 10 orders each, one has 3,000; a tenth of the orders of one kind name nobody."""
    ids = [ObjectId() for _ in range(1_000)]
    database["customers"].insert_many([{"_id": each, "name": "n"} for each in ids])
    owners = [ids[0]] * 3_000 + [each for each in ids[1:] for _ in range(10)]
    lost = [ObjectId() for _ in range(100)]
    database["orders"].insert_many(
        [
            {"customer_id": each, "seller": lost[n % 100] if n % 10 == 0 else ids[n % 1_000]}
            for n, each in enumerate(owners)
        ]
    )
    limits = Limits(structure_documents=5_000, sample_documents=2_000)
    found = {each.path: each for each in scan(database, limits=limits).scan.relations}
    relation = found["customer_id"]
    # The heaviest is counted exactly, the usual one too; only how many there are of each is estimated.
    assert (10, 10, 3_000) == (relation.children.minimum, relation.children.median, relation.children.maximum)
    assert 1_000 == pytest.approx(relation.children.count, rel=0.25)
    assert 12_990 == relation.references == relation.children.sampled_of
    assert 0 == relation.orphans
    assert relation.checked == pytest.approx(2_000, rel=0.15)
    assert 0.1 == pytest.approx(found["seller"].orphan_share, abs=0.04)


def test_references_in_arrays_of_a_large_collection(database: Any) -> None:
    database["tags"].insert_many([{"_id": f"t{n}", "name": "n"} for n in range(20)])
    database["posts"].insert_many(
        [{"title": "t", "tag_ids": [f"t{n % 20}", f"t{(n + 1) % 20}"]} for n in range(4_000)]
    )
    relation = scan(
        database, limits=Limits(structure_documents=1_000, sample_documents=1_000)
    ).scan.relations[0]
    assert ("tag_ids[]", "tags", True, 8_000) == (
        relation.path,
        relation.parent,
        relation.many,
        relation.references,
    )
    assert (400, 400) == (relation.children.minimum, relation.children.maximum)


def test_a_natural_key_that_is_not_unique_is_no_relation(database: Any) -> None:
    database["albums"].insert_many([{"AlbumId": n % 5, "Title": "t"} for n in range(50)])
    database["tracks"].insert_many([{"AlbumId": n % 5, "Name": "t"} for n in range(500)])
    assert () == scan(database).scan.relations
    database["albums"].drop()
    database["albums"].insert_many([{"AlbumId": n, "Title": "t"} for n in range(5)])
    relation = scan(database).scan.relations[0]
    assert ("tracks", "albums", "AlbumId", 100) == (
        relation.child,
        relation.parent,
        relation.key,
        relation.children.maximum,
    )


def test_every_reference_of_many_collections_is_found(database: Any) -> None:
    """Each of these fields could by its type name any of the collections."""
    before: list[ObjectId] = []
    for number in range(22):
        ids = [ObjectId() for _ in range(8)]
        database[f"part{number:02}"].insert_many(
            [
                {"_id": each, **({"owner": before[n], "next": before[-n]} if before else {})}
                for n, each in enumerate(ids)
            ]
        )
        before = ids
    found = {(each.child, each.path): each.parent for each in scan(database).scan.relations}
    assert {
        (f"part{number:02}", path): f"part{number - 1:02}"
        for number in range(1, 22)
        for path in ("owner", "next")
    } == found


def test_numbers_of_any_type_and_nested_keys_refer(database: Any) -> None:
    """Older shells write every number as a double; a unique field may lie in an object."""
    database["racks"].insert_many([{"_id": float(n), "tag": {"code": f"c{n}"}} for n in range(40)])
    database["racks"].create_index("tag.code", unique=True)
    database["books"].insert_many(
        [{"rack_id": n % 40 if n % 2 else float(n % 40), "rack_tag_code": f"c{n % 40}"} for n in range(400)]
    )
    found = {each.path: each for each in scan(database).scan.relations}
    assert ("racks", "_id", 0, 400) == (
        found["rack_id"].parent,
        found["rack_id"].key,
        found["rack_id"].orphans,
        found["rack_id"].references,
    )
    assert ("tag.code", 0, 10) == (
        found["rack_tag_code"].key,
        found["rack_tag_code"].orphans,
        found["rack_tag_code"].children.maximum,
    )


@pytest.mark.parametrize("limits", [Limits(), Limits(structure_documents=50, sample_documents=200)])
def test_values_that_cannot_be_keys_do_not_end_the_scan(limits: Limits, database: Any) -> None:
    """A regular expression among references would match others if it were looked up."""
    customers = [ObjectId() for _ in range(20)]
    database["customers"].insert_many([{"_id": each, "name": "n"} for each in customers])
    odd = [Regex(".*"), {"a": 1}, [1], None, True, Decimal128("1")]
    database["orders"].insert_many(
        [{"customer_id": odd[n % 6] if n % 10 == 0 else customers[n % 20]} for n in range(300)]
    )
    report = scan(database, limits=limits)
    assert [("orders", "customer_id")] == [(each.child, each.path) for each in report.scan.relations]
    assert [] == [note for note in report.scan.collections["orders"].notes if "understood" in note]


def test_a_cycle_in_a_tree_is_found(database: Any) -> None:
    rows = [{"_id": n, "parent_id": n - 1 if n else None, "name": "n"} for n in range(60)]
    rows[20]["parent_id"] = 40
    database["parts"].insert_many(rows)
    report = scan(database)
    tree = report.scan.collections["parts"].tree
    assert tree is not None
    assert (1, 19, 40) == (tree.roots, tree.depth_max, tree.cyclic)
    assert "problem" == next(each.severity for each in report.findings if each.code == "tree")


def test_parents_of_another_type_do_not_end_the_scan(database: Any) -> None:
    rows: list[dict[str, Any]] = [{"_id": n, "parent_id": n // 2 or None, "name": "n"} for n in range(1, 60)]
    rows[20]["parent_id"] = Decimal128("3")
    database["parts"].insert_many([*rows, {"_id": Decimal128("99"), "parent_id": 1, "name": "n"}])
    tree = scan(database).scan.collections["parts"].tree
    assert tree is not None
    assert 5 == tree.depth_max
