"""The passes of PowerSGD over matrices and their thin factors, compiled for CPUs."""
