# Image of the workers of hydra/launcher=gke and other container launchers.
# `maxhydra launch image` prints the command that builds it, or runs it with --run.
FROM python:3.12-slim

# git applies the changes that hydra.launcher.code sends with a job.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

# gpu, tpu or cpu.
ARG EXTRA=gpu
WORKDIR /opt/maxhydra
COPY . .
RUN if [ "$EXTRA" = cpu ]; then extras=data; else extras="data,$EXTRA"; fi \
    && pip install --no-cache-dir --editable ".[$extras]"

# Commit of the source. A job with changes to the code checks it before it applies them.
ARG REVISION=unknown
RUN echo "$REVISION" > REVISION

# Root, because volumes of outputs belong to root unless the pod sets securityContext (hydra.launcher.pod_patch).
WORKDIR /root
CMD ["python", "-m", "maxhydra", "--help"]
