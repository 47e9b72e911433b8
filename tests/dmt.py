"""What `dmt` printed when it ran in this process (the fixture `dmt`)."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Printed(NamedTuple):
    """Standard output and standard error."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as a program reads it."""
        return json.loads(self.out)


Dmt = Callable[..., Printed]
"""`dmt(WORD, …, code=0)` asserts the exit code."""
