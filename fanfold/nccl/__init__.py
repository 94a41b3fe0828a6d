"""NVIDIA's NCCL as this process has it, which nothing of Fanfold needs.

:mod:`fanfold.nccl.library` says what a version has, :mod:`fanfold.nccl.communicator` shares windows
of memory (:mod:`fanfold.memory.nccl`), and :mod:`fanfold.nccl.headers` lets a kernel include NCCL's
device headers.
"""
