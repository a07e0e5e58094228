#!/bin/bash
# MPI: a process for each slot, which comm.init() joins by the launcher's own variables. With several hosts, give the first one.
mpirun -n "${PROCESSES:-4}" ${HOSTS:+--host "$HOSTS" -x MASTER_ADDR="${HOSTS%%[:,]*}"} python train.py "$@"
