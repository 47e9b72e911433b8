"""Runs one rank of a run directory on a fake GPU. Writes its peak as JSON.

    python -m toolkit.rehearse.gpu RUN_DIR RANK OUTPUT

A separate process, because the replacement of CUDA must be loaded before torch is imported.
"""

import json
import sys
import warnings
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from toolkit.rehearse.gpu import guard


def main(run_dir: Path, rank: int, output: Path) -> None:
    """Rehearse one rank."""
    warnings.filterwarnings("ignore")
    guard.load()
    mode = import_module("toolkit.rehearse.gpu.device").pretend()
    ranks = import_module("toolkit.rehearse.gpu.rank")
    peak = ranks.rehearse(ranks.read(run_dir), rank, mode)
    output.write_text(json.dumps(asdict(peak)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
