#!/bin/bash
# Autoregressive language modelling on 10 servers of 8 x RTX 3090 (80 GPUs).
# From the repository's root: [TAU=24 METHOD=slowmo ...] sbatch slurm/gpt2_3090.sh [--optim.lr 2e-3 ...]
# A trial needs a folder of its own, for a run keeps its length: OUT=runs/trial sbatch slurm/gpt2_3090.sh --epochs 1
# Account and partition, if needed: SBATCH_ACCOUNT and SBATCH_PARTITION in your shell; see slurm/README.md.
#SBATCH --job-name=gpt2_3090
#SBATCH --nodes=10
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

source slurm/env.sh && source slurm/launch.sh && array_job || exit 2

RECIPE="${RECIPE:-gpt2_small_owt}" # or gpt2_medium_owt, gpt2_large_owt, transnormer_7b_owt, gpt2_small_wikitext103
METHOD="${METHOD:-co2}"            # or ddp, local, overlap_local, slowmo; zo with RECIPE=gpt2_medium_zo_owt
TAU="${TAU:-48}"                   # local steps per round, of every method but ddp and zo
ACCUMULATE="${ACCUMULATE-}" # micro-batches per step and GPU; more need less memory; empty: the recipe's
SEED="${SEED:-${SLURM_ARRAY_TASK_ID:-0}}"
GPU_GB="${GPU_GB:-24}" # GB of a GPU
case "$RECIPE" in
    gpt2_medium_zo_owt) fit=480 ;; # 12 a pair of GPUs: the recipe's 512 does not divide by 40
    gpt2_small_wikitext103) fit=240 ;; # 3 a GPU: the recipe's 256 does not divide by 80
    gpt2_large_owt) ACCUMULATE="${ACCUMULATE:-4}" ;; # 2 samples at a time, of 6 a GPU on 10 nodes or 8 on 8, to fit 24 GB
    transnormer_*_owt)
        fit=480 # 6 a GPU: the recipe's 512 does not divide by 80
        more=(--zero 3 --offload) ;; # to fit 24 GB
esac
BATCH_SIZE="${BATCH_SIZE-${fit-}}" # over all GPUs; empty: the recipe's
OUT="${OUT:-runs/3090/$RECIPE-$METHOD-tau$TAU-${SLURM_JOB_NUM_NODES-}nodes-seed$SEED}"
export CO2_DATA="${CO2_DATA:-$PWD/data}" # holds openwebtext/train.bin, openwebtext/val.bin

launch language.train ${ACCUMULATE:+--accumulate "$ACCUMULATE"} "${more[@]}" "$@"
