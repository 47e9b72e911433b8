"""What a server imports that forks ranks of `rehearse --gpu`: CUDA is replaced before torch."""

from toolkit.rehearse.gpu import guard

guard.load()
guard.load = lambda: None
from toolkit.rehearse.gpu import device  # noqa: E402 - torch comes with it

MODE = device.pretend()
device.pretend = lambda: MODE
from toolkit.backend import BACKENDS  # noqa: E402
from toolkit.registry import load  # noqa: E402
from toolkit.rehearse.gpu import rank  # noqa: E402, F401

for name in BACKENDS.names:
    load(BACKENDS[name].engine)
