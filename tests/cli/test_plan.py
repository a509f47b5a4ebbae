"""The verbs plan, apply, prove and undo, one after the other, and what they refuse."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.advisor.loop.shops import everything, plan_for, reads_of, shop
from tests.cli.invoke import RUN_SECONDS_MAX, run_verb, start
from treadle.advisor.loop.plan import write
from treadle.advisor.loop.prove import write_reads
from treadle.advisor.loop.readme import readme
from treadle.advisor.loop.workload_file import Request, end_line, header_line, read
from treadle.cli import main
from treadle.cli.apply import opened
from treadle.cli.options import FINDINGS, USAGE


def folder_for(database: Any, tmp_path: Path) -> Path:
    products = shop(database)
    plan = plan_for(database, "computed", "extended-reference")
    write(plan, tmp_path / "plan", readme(plan))
    write_reads(plan, reads_of(database, products, tmp_path / "all.workload"), tmp_path / "plan")
    return tmp_path / "plan"


def test_a_trial_becomes_a_folder_or_a_reason(uri: str, database: Any, tmp_path: Path) -> None:
    """Counts that scan 40,000 documents pay on the busiest machine; reads that nothing changes do not."""
    database["products"].insert_many([{"_id": n, "name": f"p{n}"} for n in range(4)])
    database["reviews"].insert_many([{"product_id": n % 4, "rating": n % 5} for n in range(40_000)])
    requests = [Request("count", "reviews", {"query": {"product_id": n % 4}}, at=n / 10) for n in range(40)]
    path = tmp_path / "shop.workload"
    head = header_line(database.name, read(write_lines(path, database, requests)).started)
    was = everything(database)
    folder = tmp_path / "plan"
    result = run_verb("plan", uri, "--workload", str(path), "-o", str(folder), "--only", "computed", "--json")
    assert 0 == result.exit_code, result.output
    made = json.loads(result.stdout)
    assert ["computed@reviews.product_id"] == made["findings"]
    assert [] == made["by_application"]
    assert {"It was not tried: --only names other findings."} == {each["reason"] for each in made["left_out"]}
    assert ["set up", "fill", "verify"] == [each["kind"] for each in made["steps"]]
    assert all(each["undo"] for each in made["steps"])
    assert was == everything(database)
    assert 0 == main(["apply", str(folder), uri])
    assert {10_000} == {each["review_count"] for each in database["products"].find()}
    assert 0 == main(["undo", str(folder), uri])
    assert was == everything(database)
    path.write_text(f"{head}\n{end_line(seconds=1.0)}\n")
    assert FINDINGS == main(["plan", uri, "--workload", str(path), "-o", str(tmp_path / "none")])
    assert USAGE == main(["plan", uri, "-o", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def write_lines(path: Path, database: Any, requests: list[Request]) -> Path:
    from datetime import UTC, datetime

    lines = [header_line(database.name, datetime.now(UTC))]
    lines += [*(each.as_line() for each in requests), end_line(seconds=4.0)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_applied_plan_is_not_overwritten_and_is_undone_though_it_was_edited(
    uri: str, database: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_for(database, tmp_path)
    was = everything(database)
    assert 0 == main(["apply", str(folder), uri])
    assert USAGE == main(["plan", uri, "--workload", str(tmp_path / "all.workload"), "-o", str(folder)])
    assert "plan-applied" in capsys.readouterr().err
    other = str(tmp_path / "other")
    assert USAGE == main(["plan", uri, "--workload", str(tmp_path / "all.workload"), "-o", other])
    assert "plan-treadle-in-use" in capsys.readouterr().err
    # Models are made to be worked on.
    (folder / "models.py").write_text("not Python any more")
    assert USAGE == main(["prove", str(folder), uri])
    assert "plan-folder-edited" in capsys.readouterr().err
    assert 0 == main(["undo", str(folder), uri])
    assert was == everything(database)


def test_an_interrupted_run_says_how_it_goes_on(
    uri: str, database: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(folder_for(database, tmp_path))
    with pytest.raises(KeyboardInterrupt), opened(folder, uri, None):
        raise KeyboardInterrupt
    assert f"treadle undo {folder} URI takes it back" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_the_trial(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workload, which is not there, is not looked at yet."""
    (tmp_path / "mine.txt").touch()
    assert USAGE == main(["plan", uri, "--workload", "none", "-o", str(tmp_path)])
    assert "holds other files" in capsys.readouterr().err
    assert USAGE == main(["plan", uri, "--workload", "none", "-o", str(tmp_path / "mine.txt" / "plan")])
    assert "output-invalid" in capsys.readouterr().err


def test_apply_prove_and_undo_follow_each_other(uri: str, database: Any, tmp_path: Path) -> None:
    folder = str(folder_for(database, tmp_path))
    was = everything(database)
    listed = run_verb("apply", folder, uri, "--dry-run")
    assert "Nothing was changed." in listed.output
    assert "To undo:" in listed.output
    assert was == everything(database)
    applied = run_verb("apply", folder, uri)
    assert 0 == applied.exit_code, applied.output
    assert "treadle watch --app models:store" in applied.output
    proof = run_verb("prove", folder, uri, "--json")
    proven = json.loads(proof.stdout)
    assert [] == proven["findings"]
    assert {0} == {each["different"] for each in proven["reads"]}
    # Whether it is quicker is for the clock to say; the exit code says the same as the JSON.
    assert (0 if proven["holds"] else FINDINGS) == proof.exit_code
    assert USAGE == main(["apply", folder, uri])
    undone = run_verb("undo", folder, uri, "--json")
    assert "forget the plan in treadle.plans" in json.loads(undone.stdout)["undone"]
    assert was == everything(database)
    assert USAGE == main(["undo", folder, uri])


def test_what_cannot_be_applied_is_one_sentence(
    uri: str, server: Any, database: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_for(database, tmp_path)
    was = everything(database)

    def said(*arguments: str) -> str:
        assert 0 != main([*arguments])
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text.strip().rpartition(" ")[2]

    assert "plan-folder-invalid" == said("apply", str(tmp_path / "nothing"), uri)
    assert "plan-other-database" == said("apply", str(folder), uri.replace(database.name, "elsewhere"))
    assert "plan-not-applied" == said("undo", str(folder), uri)
    assert "plan-not-applied" == said("prove", str(folder), uri)
    database.command("createUser", "reader", pwd="reader", roles=["read"])
    try:
        login = {"username": "reader", "password": "reader", "authSource": database.name}
        with MongoClient(server.uri, **login) as client:
            host, port = client.address or ("", 0)
        limited = f"mongodb://reader:reader@{host}:{port}/{database.name}?authSource={database.name}"
        assert "plan-refused" == said("apply", str(folder), limited)
    finally:
        database.command("dropUser", "reader")
    assert was == everything(database)


@pytest.mark.all
def test_an_apply_that_is_killed_goes_on(uri: str, database: Any, tmp_path: Path) -> None:
    """Wherever the signal meets it."""
    folder = str(folder_for(database, tmp_path))
    was = everything(database)
    process = start("apply", folder, uri, "--throttle", "100")
    assert process.stdout is not None
    for line in process.stdout:
        if "fill" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=RUN_SECONDS_MAX)
    assert was != everything(database)
    assert 0 == main(["apply", folder, uri])
    for each in database["products"].find():
        assert database["reviews"].count_documents({"product_id": each["_id"]}) == each["review_count"]
    assert 0 == main(["undo", folder, uri])
    assert was == everything(database)
