# What differs from site to site: sourced by every script here, in the repository's root. Edit it once, or set a
# variable for one job: VENV=~/co2-env sbatch slurm/vision_a100.sh

# Modules to load, separated by spaces, such as "cuda/12.8 nccl".
for module in ${MODULES-}; do
    module load "$module" || return
done

# Python: a conda environment if CONDA_ENV names one, else the virtual environment VENV (empty: what PATH has).
if [ -n "${CONDA_ENV-}" ]; then
    eval "$(conda shell.bash hook)" && conda activate "$CONDA_ENV" || return
elif [ -n "${VENV-.venv}" ]; then
    source "${VENV-.venv}/bin/activate" || return
fi

# The folder of this site's data sets, for all scripts; empty: each script's own default, which stands at its top.
CO2_DATA="${CO2_DATA-}"

# The network interface between nodes, such as bond0 or eth; empty: NCCL and gloo choose. NCCL takes a prefix or a list,
# gloo a full name. For TCP/IP in place of RoCE or InfiniBand: NCCL_IB_DISABLE=1 sbatch ...
IFACE="${IFACE-}"
if [ -n "$IFACE" ]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$IFACE}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$IFACE}"
fi

# More arguments for srun, such as a container's: "--container-image=co2.sqsh --container-mounts=$PWD:$PWD,/data:/data".
SRUN_ARGS="${SRUN_ARGS-}"

# More arguments for torchrun. --numa-binding=node keeps each worker and its loader processes on the cores beside its
# GPU; it needs torch 2.9 or newer, and numactl.
TORCHRUN_ARGS="${TORCHRUN_ARGS-}"
