# One image for all services and the command line; weights are kept outside, see docs/deploy-compose.md.
#
#   docker build -t outrider:cpu .
#   docker build -t outrider:cuda --build-arg TORCH_FLAGS= .
#
# torch's builds for CUDA bring its libraries along, so both variants stand on the same base.

# Any image of a Debian kind with Python 3.11 or newer, and its venv module, as python3.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=torch==2.13.0
# Where torch is taken from; empty: its build for CUDA, from the same index as everything else.
ARG TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# Several options in one argument are meant to be several words.
# hadolint ignore=SC2086
RUN python3 -m venv /opt/outrider \
    && /opt/outrider/bin/pip install ${TORCH_FLAGS} "${TORCH}"
# What the code needs changes less often than the code does, so it has a layer of its own.
COPY pyproject.toml constraints.txt ./
RUN /opt/outrider/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*p['dependencies'], *p['optional-dependencies']['otlp'], 'setuptools', sep='\n')" > requirements.txt \
    && /opt/outrider/bin/pip install -c constraints.txt -r requirements.txt

# Beside what it needs, not among it: a change of the code changes one small layer of the image.
FROM build AS code
COPY . .
RUN /opt/outrider/bin/pip install --no-deps --no-build-isolation --root /code .

FROM ${BASE}
LABEL org.opencontainers.image.title="outrider" \
      org.opencontainers.image.description="Exact, pipelined, distributed speculative decoding over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0"
# A volume that is first mounted at /models gets this owner.
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin outrider \
    && install -d -o 10001 -g 10001 /models
COPY --from=build /opt/outrider /opt/outrider
COPY --from=code /code/opt/outrider /opt/outrider
# The root is mounted read-only: what is written goes to /tmp, and what `outrider fetch` brings is found in /models.
ENV PATH=/opt/outrider/bin:${PATH} \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/models/packages \
    OUTRIDER_CACHE=/models/cache HF_HOME=/models/hub HF_HUB_DISABLE_TELEMETRY=1 \
    HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib NUMBA_CACHE_DIR=/tmp/numba \
    GRPC_VERBOSITY=ERROR
USER 10001:10001
WORKDIR /tmp
# Asks the service that the container's own variables describe.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["outrider", "health"]
CMD ["outrider", "--help"]
