"""One report of a GPU: is it correct there, what does it cost, do real loops overlap, what does GPT-2 Small lose.

    make gpu-report                                     # everything, on the machine that has the GPU
    make gpu-report GPU="--parts correctness --minutes 9"

Four parts, in this order: `correctness` (5 minutes on an H200), `costs`, `loops`, `search`. A line a check goes into
OUT/gpu.json as soon as it is known, and OUT/gpu.md is made of that. A check that raises, hangs or takes its process
down is a line with its error; the exit status is then 1. A line that is there is not run again, so a second call goes
on where the first one was stopped; `--checks WORD...` runs those checks again whose names hold a WORD. Another
torch or device begins anew, and another commit without `--keep`.

On a device that is lent for a few minutes at a time, without a network, a handful of calls is enough:

    pip download --no-deps -c constraints.txt -d wheels tyro docstring_parser typeguard  # where there is a network
    export CO2_WHEELS=wheels CO2_DATA=data
    make gpu-report GPU="--parts correctness --minutes 9"     # each call ends within 600 s
    make gpu-report GPU="--parts costs loops --minutes 9"
    make gpu-report GPU="--parts search --minutes 9"          # again, until it says that nothing is left

`--minutes` counts from the start of the command: what does not fit is left for the next call, and a check that the end
cuts off begins anew there. Where each call begins on a bare machine, results/gpu.json, results/gpu.md and
results/gpu_search.jsonl are carried from one to the next. Without .venv the command takes `python3`: torch from 2.6 on
with CUDA and triton, numpy, transformers and tokenizers, and for loops scikit-learn, timm, tensorboard and matplotlib.
CO2_WHEELS is a folder of pure Python wheels that this Python lacks; they are read where they lie. The search needs the
Gutenberg books in CO2_DATA. Where there is no git, `--commit` names the code.
"""
