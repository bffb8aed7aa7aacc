# For clusters:  docker build -t gpipe-hpc .
# For CPUs:      docker build -t gpipe-hpc:cpu --build-arg BASE=debian:bookworm-slim \
#                  --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# Run:           docker run --gpus all --ipc host gpipe-hpc --nproc_per_node 8 -m gpipe_hpc.train ...
# The CUDA libraries come with torch's wheel; the base is there for the hooks of the container runtime.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE}

# Where torch comes from besides PyPI, whose torch is the CUDA build; empty: PyPI alone.
ARG TORCH_INDEX=

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Python may be in the base already; its version must be 3.11 or newer. No version is asked of packages
# of the base: whoever names the base by its digest has chosen them.
# hadolint ignore=DL3008
RUN if ! python3 -m venv --help >/dev/null 2>&1 || ! python3 -c 'import ensurepip' 2>/dev/null; then \
        apt-get update \
        && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && python3 -c 'import sys; assert sys.version_info >= (3, 11), sys.version' \
    && python3 -m venv /opt/gpipe \
    && useradd --create-home --uid 10001 gpipe

ENV PATH=/opt/gpipe/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# The dependencies first: they change less often than the sources.
COPY requirements.run.lock /tmp/
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -r /tmp/requirements.run.lock \
    && rm /tmp/requirements.run.lock

COPY . /tmp/source
RUN pip install --no-cache-dir --no-deps --no-build-isolation /tmp/source \
    && rm -rf /tmp/source

# A run writes under its working folder: mount one here that the user may write to.
WORKDIR /work
RUN chown gpipe /work
# By number, so that Kubernetes can tell that it is not root.
USER 10001

# torchrun's own options, then -m gpipe_hpc.train and its settings. Under srun or mpirun, which start
# the ranks themselves: --entrypoint python ... -m gpipe_hpc.train
ENTRYPOINT ["torchrun"]
CMD ["--standalone", "--nproc_per_node", "1", "-m", "gpipe_hpc.train"]
