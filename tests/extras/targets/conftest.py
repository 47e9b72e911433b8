"""The recipe that files of other tools are compared with, and megatron-core."""

from tests.engines.conftest import megatron_core as megatron_core
from tests.targets.conftest import tiny as tiny
