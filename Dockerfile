# DMT on an official image of PyTorch:
#
#   docker build -t dmt .
#   docker run --rm --gpus all dmt                       # dmt doctor
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" dmt dmt launch recipe.yaml
#
# BASE: any image with torch 2.11 to 2.14, Python 3.11 to 3.13 and, to compile DeepSpeed's
# operators (offload, NVMe), a CUDA toolkit: the `devel` ones have it.
ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel
FROM ${BASE}

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libaio-dev openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/dmt
# The image's torch stays: its CUDA fits its drivers. No operator is compiled before it is used.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 DS_BUILD_OPS=0
RUN python -c 'import torch; print(f"torch=={torch.__version__}")' > /opt/torch.txt \
    && pip install -c /opt/torch.txt '/opt/dmt[tensorboard]' \
    && dmt --version

RUN useradd --create-home --uid 10001 dmt && install -d -o dmt -g dmt /work
USER 10001
WORKDIR /work
CMD ["dmt", "doctor"]
