"""What a GPU that is not there holds: streams and storages that change their size."""

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT

SCRIPT = """
from toolkit.rehearse.gpu import guard
guard.load()
from toolkit.rehearse.gpu import device
mode = device.pretend()
import json, torch
from toolkit.rehearse.gpu.watch import Watch

def mib(size):
    return torch.empty(size * 2**20, dtype=torch.uint8, device="cuda")

watch = Watch(torch.bfloat16, lambda _: False)
with mode, watch.watching():
    kept = mib(30)
    watch.begin("resume")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_side = mib(40)
        assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    del on_side
    first = mib(60)
    first.untyped_storage().resize_(0)  # as FSDP drops gathered weights
    second = mib(50)
    first.untyped_storage().resize_(0)
    del second
account = watch.account
print(json.dumps([account.peak("resume").nbytes, *account.reserved(expandable=False)]))
"""


@pytest.mark.slow
def test_streams_share_no_memory() -> None:
    """Of 30, 40 on another stream, then 60 and 50 MiB, 90 are there at once; the 40 are kept
    for their stream as long as there is room."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, reserved, least = (size / 2**20 for size in json.loads(done.stdout.splitlines()[-1]))
    assert peak == 90
    assert reserved == 30 + 40 + 60
    assert least == pytest.approx(90, abs=1)
