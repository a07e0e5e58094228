#!/bin/bash
# Slurm: a process for each task, which comm.init() joins by Slurm's own variables.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --signal=USR1@120
srun python train.py "$@"
