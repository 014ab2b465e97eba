"""scripts/bench measures on real mounts and reports; how fast anything is, no test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run_bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(filter(None, [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


@pytest.mark.fuse
def test_the_report_tells_of_each_line_what_was_measured_and_what_is_to_be_reached(tmp_path: Path) -> None:
    done = run_bench("--quick", "--lines", "4,10", "--data", tmp_path / "data", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["quick"] is True
    assert report["machine"]["processors"] == os.cpu_count()
    by_line = {line["line"]: line for line in report["lines"]}
    assert set(by_line["10"]) == {"line", "what", "figure", "unit", "reach", "met", "note", "samples"}
    assert by_line["10"]["figure"] > 0
    assert len(by_line["10"]["samples"]["dafmount"]) > 1
    assert by_line["4"]["figure"] is None, "other programs are measured only when asked for"
    assert "--peers" in by_line["4"]["note"]
    assert by_line["10"]["what"] in done.stdout


def test_an_unknown_line_is_refused() -> None:
    done = run_bench("--lines", "1,99")
    assert done.returncode == 2
    assert "99" in done.stderr
