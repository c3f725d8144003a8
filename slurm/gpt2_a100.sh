#!/bin/bash
# Autoregressive language modelling on 16 x DGX-A100 (128 GPUs).
# From the repository's root: [TAU=24 METHOD=slowmo ...] sbatch slurm/gpt2_a100.sh [--optim.lr 2e-3 ...]
# A trial needs a folder of its own, for a run keeps its length: OUT=runs/trial sbatch slurm/gpt2_a100.sh --epochs 1
# Account and partition, if needed: SBATCH_ACCOUNT and SBATCH_PARTITION in your shell; see slurm/README.md.
#SBATCH --job-name=gpt2_a100
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128
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
GPU_GB="${GPU_GB:-40}" # GB of a GPU; 80 in the larger DGX-A100
case "$RECIPE" in
    gpt2_medium_zo_owt) ;; # its own 512 divides by 64 pairs of GPUs
    gpt2_*_owt) fit=512 ;; # 4 a GPU: the recipe's 480 does not divide by 128
    transnormer_*_owt) [ "$GPU_GB" -ge 80 ] || more=(--zero 3) ;; # to fit 40 GB
esac
BATCH_SIZE="${BATCH_SIZE-${fit-}}" # over all GPUs; empty: the recipe's
OUT="${OUT:-runs/a100/$RECIPE-$METHOD-tau$TAU-${SLURM_JOB_NUM_NODES-}nodes-seed$SEED}"
export CO2_DATA="${CO2_DATA:-$PWD/data}" # holds openwebtext/train.bin, openwebtext/val.bin

launch language.train ${ACCUMULATE:+--accumulate "$ACCUMULATE"} "${more[@]}" "$@"
