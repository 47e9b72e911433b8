"""`python -m toolkit.evaluate.process`: evaluates the model in a Hugging Face folder.

A process of its own, so that nothing of an evaluation stays in the memory of a training rank.
Its standard input is the JSON of a `Request`; it writes `Findings` to the request's file, and
prints its progress on standard error. It ends when the process that started it does.
"""

import json
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import EXIT_FAILED, DmtError
from toolkit.evaluator import EVALUATORS
from toolkit.registry import load
from toolkit.system.atomic import write_atomically
from toolkit.system.parent import end_with_parent


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how."""

    folder: str
    """With config, tokenizer and, unless it is only prepared, weights."""
    settings: dict[str, dict[str, Any]]
    """Of each evaluator, by its name."""
    device: str
    prepare: bool
    """Only check that the evaluators can run."""
    out: str
    """The file for the answer."""
    parent: int
    """Process id of who asks."""


@dataclass(frozen=True)
class Findings:
    """The findings of each evaluator, or the first error."""

    findings: dict[str, Any]
    error: str = ""
    fix: str = ""
    exit_code: int = 0


def main() -> int:
    """Carry out the request on standard input."""
    request = Request(**json.loads(sys.stdin.readline()))
    # Set here, not between fork and exec: a rank has threads and pinned memory.
    if not end_with_parent(request.parent, signal.SIGKILL):
        return EXIT_FAILED
    answer = _answer(request)
    write_atomically(Path(request.out), json.dumps(asdict(answer)))
    return answer.exit_code


def _answer(request: Request) -> Findings:
    findings = {}
    try:
        for name, stated in request.settings.items():
            evaluator = EVALUATORS[name]
            settings = evaluator.section.model_validate(stated, strict=False)
            if request.prepare:
                load(evaluator.prepare)(Path(request.folder), settings)
            else:
                evaluate = load(evaluator.evaluate)
                findings[name] = evaluate(Path(request.folder), settings, request.device)
    except DmtError as error:
        return Findings(findings, error.message, error.fix, error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last resort: the one who asks reports it
        traceback.print_exc()
        lines = str(error).strip().splitlines()[:1]
        message = ": ".join([type(error).__name__, *lines])
        return Findings(findings, f"{name}: {message}", "", EXIT_FAILED)
    return Findings(findings)


if __name__ == "__main__":
    sys.exit(main())
