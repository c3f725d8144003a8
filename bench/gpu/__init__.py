"""A report of a GPU: the cost of the outer step and of compression.

    make gpu-report                                   # on the machine that has the GPU
    make gpu-report GPU="--checks copy"

`make test-gpu` tests whether the GPU computes the right thing. Each measurement adds a row to OUT/gpu.json as soon as
it ends, and the end of the call prints them. A second call measures only what has no row of this commit, device and
torch, so that several calls can share a short loan of a GPU. `--checks WORD` repeats the measurements with
WORD in their names.

Both commands run without `make setup`, on a machine with python3, torch with CUDA and Triton, numpy, and pytest for the
tests. Wheels of pure Python can serve for missing packages:

    pip download --no-deps -c constraints.txt -d wheels tyro docstring_parser typeguard  # where there is a network
    export PYTHONPATH=$(printf '%s:' wheels/*.whl)
"""
