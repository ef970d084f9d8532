#!/usr/bin/env bash
# sbatch --wait fp8-gate.slurm.sh, in a clone: gates HEAD against main. The job's exit status is pytest's.
#SBATCH --job-name=fp8-gate
#SBATCH --gpus=h100:1
#SBATCH --exclusive
#SBATCH --time=01:30:00
# SIGTERM to the step, that is to pytest, five minutes before the limit: the report is still written.
#SBATCH --signal=TERM@300
#SBATCH --output=fp8-gate-%j.log
set -euo pipefail

source venv/bin/activate # the project with torch, pytest-fp8 and its FP8 library: pip install -e . -r requirements-fp8.txt
base=$(git merge-base HEAD origin/main)

srun pytest tests/test_fp8.py --fp8-gpu=h100 --fp8-base="$base" \
  --fp8-report="fp8-report-$SLURM_JOB_ID"
