"""NVIDIA's NCCL as this process has it, and its device API for kernels that NVRTC compiles.

Nothing of Fanfold needs NCCL yet: :mod:`fanfold.nccl.library` says what an installed version has,
and :mod:`fanfold.nccl.headers` lets a kernel include its headers.
"""
