"""What only some requests need is loaded once the start is over, before the first of them comes."""

from __future__ import annotations

from pathlib import Path

import psutil
from serving import Start, until


def test_no_request_waits_for_the_compiler_of_grammars(start: Start, tmp_path: Path) -> None:
    server = start("serve", "--port", "0", "--state-dir", str(tmp_path / "state"))
    server.wait_for("penstock ready")
    parts = psutil.Process(server.pid).children(recursive=True)
    (worker,) = [part for part in parts if "worker" in part.cmdline()]
    until(lambda: any("xgrammar" in file.path for file in worker.memory_maps()) or None)
    (front,) = [part for part in parts if "front" in part.cmdline()]
    until(lambda: any("penstock.engine.grammar.checker" in child.cmdline() for child in front.children()) or None)
