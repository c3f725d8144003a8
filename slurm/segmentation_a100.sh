#!/bin/bash
# Semantic segmentation on 16 x DGX-A100 (128 GPUs). From the repository's root:
# [RECIPE=... TAU=24 METHOD=slowmo ...] sbatch slurm/segmentation_a100.sh [--optim.lr 2e-3 ...]
#SBATCH --job-name=segmentation_a100
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

source slurm/task.sh segmentation a100 "$@"
