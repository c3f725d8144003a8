#!/bin/sh
# What both images hold: install.sh CONSTRAINTS installs what its packages need of Debian, and then those packages.
set -eu

# libgl1, libglib2.0-0: of OpenCV; g++: of torch.compile and Triton; numactl: of torchrun's --numa-binding; procps: pkill,
# of slurm/launch.sh; git: for the commit in a run's config.json; libibverbs1, ibverbs-providers (of rdma-core): NCCL
# loads them to use InfiniBand and RoCE, and without them takes TCP and says nothing
apt-get update
apt-get install -y --no-install-recommends g++ git ibverbs-providers libgl1 libglib2.0-0 libibverbs1 \
    numactl procps
rm -rf /var/lib/apt/lists/*

# torch's wheel for Linux is the CUDA build, and brings CUDA's libraries, cuDNN and NCCL; the driver is the host's.
python -m pip install --no-cache-dir --disable-pip-version-check --requirement "$1"
python -c 'import sys, torch; sys.exit(torch.version.cuda is None and "torch came without CUDA")'
python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")'
python -c 'import cv2, mmseg, timm, transformers'
