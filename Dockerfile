# Image for CPUs with PyTorch, TensorFlow, Open MPI, Horovod and accordion_hvd.
#
#   docker build --build-arg TORCH_INDEX=URL -t accordion-hvd .
#   docker run --rm accordion-hvd horovodrun -np 2 python examples/pytorch/image_classification.py
#
# TORCH_INDEX is the URL of PyTorch's index of CPU wheels. Without it, pip installs the CUDA libraries of several GB.
FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make patch \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/accordion_hvd
COPY . .
ARG TORCH_INDEX=""
# The versions of the frameworks are those that are tested together.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        $(grep -E '^(torch|tensorflow-cpu|keras)==' requirements.txt) \
        '.[mpi,build,graph,privacy,train]' \
    && accordion-hvd build-horovod

# The compiler is not part of the image. Workers of the MPI operator run sshd.
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd
COPY --from=build /opt/venv /opt/venv
COPY examples /opt/accordion_hvd/examples
ENV PATH=/opt/venv/bin:$PATH \
    OMP_NUM_THREADS=1 \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
WORKDIR /opt/accordion_hvd
CMD ["accordion-hvd", "doctor"]
