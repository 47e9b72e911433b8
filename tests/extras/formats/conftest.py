"""As in the tests of the core's formats."""

from tests.data.conftest import offline

__all__ = ["offline"]
