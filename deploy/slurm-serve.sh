#!/bin/bash
# Serves a model on this cluster's nodes, one rank per task, for as long as the job may run.
#
#   sbatch --nodes 1 --ntasks-per-node 4 --cpus-per-task 16 deploy/slurm-serve.sh MODEL_DIRECTORY KEYS [BOUND]
#   scancel --signal=USR1 JOB    # drains: accepted requests are finished, then the job ends
#
# KEYS is a file with one API key per line. The server listens on the first node, at port 8000 or $PORT; from outside:
# ssh -L 8000:NODE:8000 LOGIN. One task is one device, as in deploy/slurm-profile.sh, whose profile is found again
# through EXEGPT_CACHE. A rank that ends takes the job along: --requeue starts it again.
#SBATCH --job-name=exegpt-serve
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --requeue
# Two minutes before the time is over the ranks get SIGUSR1, which drains:
#SBATCH --signal=USR1@120
# On nodes with GPUs, by default none of which is seen:
##SBATCH --gpus-per-task=1
set -euo pipefail

model=${1:?"usage: sbatch deploy/slurm-serve.sh MODEL_DIRECTORY KEYS [BOUND]"}
keys=${2:?"usage: sbatch deploy/slurm-serve.sh MODEL_DIRECTORY KEYS [BOUND]"}
bound=${3:-10s}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export EXEGPT_CACHE=${EXEGPT_CACHE:-$PWD/exegpt-cache}
echo "exegpt on $(hostname):${PORT:-8000}"

# Where Slurm has no PMIx (srun --mpi=list): mpirun --map-by slot:PE=$OMP_NUM_THREADS instead of srun and its options.
srun --mpi=pmix --cpus-per-task="$OMP_NUM_THREADS" --cpu-bind=cores \
    exegpt serve --model "$model" --latency-bound "$bound" --workload S --host 0.0.0.0 --port "${PORT:-8000}" \
    --api-key-file "$keys" --drain-timeout 90s --log-format json
