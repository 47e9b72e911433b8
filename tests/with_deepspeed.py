"""DeepSpeed, imported as an engine imports it: for the server of tests/forked.py."""

from toolkit.engines.deepspeed.models import import_deepspeed

import_deepspeed()
