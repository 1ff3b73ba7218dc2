"""The pages show what the result files say, and are up to date."""

from __future__ import annotations

from pathlib import Path

from isofed.papers import pages
from isofed.papers.plan import Job, Length, matching
from isofed.papers.presets import load

from .made import write

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_those_that_the_results_make() -> None:
    made, folder = pages.build(ROOT / "results"), ROOT / "docs" / "results"
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    changed = [name for name in {*made, *there} if made.get(name) != there.get(name)]
    assert changed == [], "write them anew: isofed paper pages"


def test_a_page_shows_numbers_notes_variants_and_what_was_tried(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    fedavg, feduv = matching(preset.cells, "pacs", "FedAvg,FedUV")
    write(tmp_path, Job(fedavg, 0), {"accuracy": 60.0})
    write(tmp_path, Job(feduv, 0), {"accuracy": 61.0})
    write(tmp_path, Job(fedavg, 0, Length(0.3)), {"accuracy": 52.0})
    write(tmp_path, Job(feduv, 0, Length(), (("feduv.lam", "2.5"),)), {"accuracy": 66.6})
    (paper,) = matching(preset.of("paper"), "pacs", "FedUV")
    write(tmp_path, Job(paper, 0), {"accuracy": 63.0})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "feduv.md").write_text("Of all.\n\n## table1\n\nOf this one.\n\n## table2\n\nOf that.\n")
    (tmp_path / "notes" / "data.yaml").write_text("pacs: packed smaller than published\n")
    made = pages.build(tmp_path)
    assert set(made) == {"index.md", "feduv.md", "univarfl.md", "spherefed.md", "feddecorr.md", "fedalign.md"}
    general, table1, table2 = made["feduv.md"].split("\n## ")[:3]
    assert "Of all." in general and "Of this one." in table1 and "Of that." in table2
    assert "| PACS | domain | FedAvg | 61.9 ± 0.6 | 60.0 | 1 | -1.9 | no |" in table1
    assert "Paper: FedUV, FedAvg. Here: FedUV, FedAvg. 1 of 1 pairs agree." in table1
    assert "**Shortened to 0.3 of the rounds**" in table1 and "| 52.0 | 1 |" in table1
    assert "**Variant `paper`**: As the paper's text has it" in table1 and "| 63.0 | 1 |" in table1
    assert "the code is followed" in general
    assert "- `detached`: FedUV's median as a constant" in general  # not run, and still to be found
    assert "- PACS domain FedUV, seed 0, `feduv.lam=2.5`: 66.6" in table1
    assert "On a chip in fp32; torch 2;" in table1
    assert "| [FedUV table 1](feduv.md#table-1) | 45 | 2 | 0 of 2 |" in made["index.md"]
    for page in ("index.md", "feduv.md"):
        assert "- `pacs`, fingerprint `ffffffffffff`: packed smaller than published" in made[page]
    assert max(len(line) for text in made.values() for line in text.splitlines()) < 400


def test_a_page_tells_of_its_own_data_and_of_no_time_twice(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    (fedavg,) = matching(preset.cells, "cifar100,alpha=0.01", "FedAvg")
    (refitted,) = matching(preset.of("ffc"), "cifar100,alpha=0.01", "FedAvg")
    for cell in (fedavg, refitted):  # whose rounds are the same ones
        write(tmp_path, Job(cell, 0), {"accuracy": 50.0, "seconds": 4.0})
    made = pages.build(tmp_path)
    assert "- `cifar100`, fingerprint" in made["feduv.md"]
    assert "fingerprint" not in made["spherefed.md"]  # other runs on the same data
    tables = {text.split("\n")[0]: text for text in made["feduv.md"].split("\n## ")}
    assert "**Variant `ffc`**" in tables["Table 1"]
    assert "| 1.00x |" in tables["Table 5"] and "ffc" not in tables["Table 5"]


def test_a_page_counts_the_hours_of_runs_that_had_the_machine_for_themselves(tmp_path: Path) -> None:
    fedavg, feduv = matching(load("feduv", "table1").cells, "pacs", "FedAvg,FedUV")
    write(tmp_path, Job(fedavg, 0), {"accuracy": 60.0}, seconds=1800.0)
    write(tmp_path, Job(feduv, 0), {"accuracy": 61.0}, seconds=90000.0, alone=False)
    text = " ".join(pages.build(tmp_path)["feduv.md"].split())
    assert "torch 2; 0.50 hours of training and 1 run beside other work, not timed." in text


def test_pages_are_written_whole(tmp_path: Path) -> None:
    written = pages.write(tmp_path / "none", tmp_path / "docs")
    assert sorted(written) == sorted((tmp_path / "docs").iterdir()) and len(written) == 6
    assert {path.name: path.read_text() for path in written} == pages.build(tmp_path / "none")


def test_remarks_on_printed_numbers_stand_under_their_table(tmp_path: Path) -> None:
    preset = load("feduv", "table4")
    freeze, fedavg = matching(preset.cells, "cifar100", "Freeze")[0], matching(preset.cells, "pacs", "FedAvg")[0]
    for cell in (freeze, fedavg):
        write(tmp_path, Job(cell, 0), {"accuracy": 50.0})
    (table,) = [text for text in pages.build(tmp_path)["feduv.md"].split("\n## ") if text.startswith("Table 4")]
    said = " ".join(table.split())
    assert "Of the printed numbers: CIFAR-100 alpha=0.01 or domain Freeze: differs from T1 (51.1); PACS" in said
    assert "PACS alpha=0.01 or domain FedAvg: unreadable; T1 alpha=0.01/domain gives 61.9+-0.6." in said


def test_what_goes_on_from_another_run_counts_no_training_twice(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    (refitted,) = matching(preset.of("ffc"), "pacs", "FedAvg")
    write(tmp_path, Job(refitted, 0), {"accuracy": 50.0}, seconds=7200.0)
    assert "torch 2; no training besides" in pages.build(tmp_path)["feduv.md"]
