#!/bin/bash
# Measures a model's layers, collectives and links on this cluster, then finds a schedule for it.
#
#   sbatch --nodes 2 --ntasks-per-node 2 --cpus-per-task 16 deploy/slurm-profile.sh MODEL_DIRECTORY [RESULTS]
#
# One task is one device: a GPU where the nodes have them, as many tasks as GPUs; else a share of the processors, best a
# task per NUMA domain with all of its cores. The model and the results must lie where all nodes see them. A job that
# was cut short goes on where it stopped: submit it again.
#SBATCH --job-name=exegpt-profile
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=02:00:00
# On nodes with GPUs, by default none of which is seen:
##SBATCH --gpus-per-task=1
set -euo pipefail

model=${1:?"usage: sbatch deploy/slurm-profile.sh MODEL_DIRECTORY [RESULTS]"}
results=${2:-$PWD}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export EXEGPT_CACHE=${EXEGPT_CACHE:-$results/exegpt-cache} # keeps what is measured until the profile is whole

# Where Slurm has no PMIx (srun --mpi=list): mpirun --map-by slot:PE=$OMP_NUM_THREADS instead of srun and its options.
srun --mpi=pmix --cpus-per-task="$OMP_NUM_THREADS" --cpu-bind=cores \
    exegpt profile --model "$model" --out "$results/profile.json" --cluster-out "$results/cluster.yaml"

exegpt tune --latency-bound 10s --workload S --model "$model" \
    --cluster "$results/cluster.yaml" --profile "$results/profile.json" --out "$results/schedule.json"
