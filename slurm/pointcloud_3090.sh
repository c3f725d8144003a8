#!/bin/bash
# 3-D point-cloud reconstruction on 10 servers of 8 x RTX 3090 (80 GPUs).
# From the repository's root: [TAU=24 METHOD=slowmo ...] sbatch slurm/pointcloud_3090.sh [--optim.lr 2e-3 ...]
# A trial needs a folder of its own, for a run keeps its length: OUT=runs/trial sbatch slurm/pointcloud_3090.sh --epochs 1
# Account and partition, if needed: SBATCH_ACCOUNT and SBATCH_PARTITION in your shell; see slurm/README.md.
#SBATCH --job-name=pointcloud_3090
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

RECIPE="${RECIPE:-shapenet_folding}" # or shapenet_mlp, shapenet_mae, shapenet55_mae
METHOD="${METHOD:-co2}"              # or ddp, local, overlap_local, slowmo
TAU="${TAU:-12}"                     # local steps per round, of every method but ddp
SEED="${SEED:-${SLURM_ARRAY_TASK_ID:-0}}"
GPU_GB="${GPU_GB:-24}" # GB of a GPU
LOADER_WORKERS="${LOADER_WORKERS:-$(loader_workers)}" # processes per GPU that load data
case "$RECIPE" in
    shapenet55_mae) fit=160 ;; # 2 a GPU: the recipe's 128 does not divide by 80
esac
BATCH_SIZE="${BATCH_SIZE-${fit-}}" # over all GPUs; empty: the recipe's
OUT="${OUT:-runs/3090/$RECIPE-$METHOD-tau$TAU-${SLURM_JOB_NUM_NODES-}nodes-seed$SEED}"
export CO2_DATA="${CO2_DATA:-$PWD/data}" # holds ShapeNetCore.v2.PC15k/SYNSET/SPLIT/*.npy; packed: see docs/tasks.md

launch pointcloud.train "$@"
