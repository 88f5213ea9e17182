# Works with and without a GPU: the CUDA libraries come as dependencies of torch.
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# The official image comes without bytecode, and a pod's user could not write it: each process would compile what it imports
# of the standard library, which is half of the time in which flytekit is imported.
RUN python -m compileall -q -x tests "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

# As in the Makefile; takes half of pip's time.
RUN pip install --no-cache-dir uv==0.13.8
ENV UV_SYSTEM_PYTHON=1 \
    UV_NO_CACHE=1 \
    UV_COMPILE_BYTECODE=1

# This layer depends only on the lock; wheels only, so no compiler is needed.
COPY requirements.txt /tmp/requirements.txt
RUN uv pip install --no-deps --only-binary=:all: --require-hashes -r /tmp/requirements.txt

# Flytekit leaves s3fs's sessions open until its processes end, which is then logged as an error. This is done here
# because a pod's first process is flytekit's own and loads none of our code.
RUN echo 'import logging; logging.getLogger("flytekit").addFilter(lambda line: "Unclosed c" not in str(line.msg))' \
    > "$(python -c 'import site; print(site.getsitepackages()[0])')/flytekit_open_sessions.pth"

# A numeric user, so that Kubernetes can tell that it isn't root. Flyte unpacks a code archive into /root, or with
# --destination-dir . into the working directory: here both are the same, as in Flyte's own images, and owned by the user.
RUN useradd --create-home --uid 1000 flyte && chown flyte:flyte /root
USER 1000
ENV HOME=/home/flyte \
    PYTHONPATH=/root
WORKDIR /root

# The image's own name, for tasks that name none.
ARG FLYTE_INTERNAL_IMAGE=flyte-ddp-training:latest
ENV FLYTE_INTERNAL_IMAGE=${FLYTE_INTERNAL_IMAGE}

COPY --chown=1000:1000 flyte_ddp ./flyte_ddp
COPY --chown=1000:1000 workflows ./workflows
RUN python -m compileall -q .
