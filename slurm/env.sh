# What differs from site to site: sourced by every script here, in the repository's root. Edit it once, or set a
# variable for one job: VENV=~/co2-env sbatch slurm/vision_a100.sh

# Modules to load, separated by spaces, such as "cuda/12.8 nccl".
for module in ${MODULES-}; do
    module load "$module" || return
done

# A container with Python and the packages (slurm/containers/), in which the workers run: for Pyxis a .sqsh file or a
# registry's image, for apptainer a .sif file; empty: none. It sees the repository, CO2_DATA, CO2_CACHE, OUT, MODEL and
# DATA; CONTAINER_MOUNTS adds folders, such as "/scratch:/scratch,/sets:/data".
CONTAINER="${CONTAINER-}"
CONTAINER_MOUNTS="${CONTAINER_MOUNTS-}"

# Python, without a container: a conda environment if CONDA_ENV names one, else the virtual environment VENV (empty: what
# PATH has).
if [ -n "$CONTAINER" ]; then
    : # it has its own
elif [ -n "${CONDA_ENV-}" ]; then
    eval "$(conda shell.bash hook)" && conda activate "$CONDA_ENV" || return
elif [ -n "${VENV-.venv}" ]; then
    [ -f "${VENV-.venv}/bin/activate" ] || {
        echo "error: no ${VENV-.venv}/bin/activate: run make setup, or set VENV, CONDA_ENV or CONTAINER" >&2
        return 2
    }
    source "${VENV-.venv}/bin/activate" || return
fi

# The folder of this site's data sets, for all scripts; empty: each script's own default, which stands at its top.
CO2_DATA="${CO2_DATA-}"

# The network interface between nodes, by its full name, such as bond0; empty: NCCL and gloo choose. A prefix or a list,
# which NCCL alone takes, goes into NCCL_SOCKET_IFNAME. For TCP/IP in place of RoCE or InfiniBand: NCCL_IB_DISABLE=1 sbatch ...
IFACE="${IFACE-}"
if [ -n "$IFACE" ]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$IFACE}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$IFACE}"
fi

# More arguments for srun, such as --network or more of a container's; the last may be a command that runs what follows.
SRUN_ARGS="${SRUN_ARGS-}"

# More arguments for torchrun. --numa-binding=node keeps each worker and its loader processes on the cores beside its
# GPU; it needs torch 2.9 or newer, and numactl.
TORCHRUN_ARGS="${TORCHRUN_ARGS-}"
