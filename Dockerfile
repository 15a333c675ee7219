# Slotgate in a container: `docker build -t slotgate .`; docs/deploy.md says how it is run.
#
# Two stages: pip and everything that builds stay in the first. The second runs as user 10001, writes nothing, and
# works with a read-only root file system.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim AS build

WORKDIR /src
# --without-pip: the environment is copied whole, and no installer should be in what runs.
RUN python -m venv --without-pip /opt/slotgate
COPY pyproject.toml README.md LICENSE requirements-dev.lock ./
COPY gateway gateway
# Wheels only, of the versions that the tests last passed with: nothing is compiled, so no compiler is needed.
# Only hatchling makes this project's own wheel, and is gone afterwards.
RUN pip --python /opt/slotgate/bin/python install --no-cache-dir --disable-pip-version-check \
      --only-binary=:all: --constraint requirements-dev.lock . \
 && /opt/slotgate/bin/python -m compileall -q /opt/slotgate/lib


FROM python:${PYTHON}-slim

ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="slotgate" \
      org.opencontainers.image.description="One OpenAI-compatible address in front of several self-hosted LLM engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The folders have an owner here, so that new volumes mounted there have it too: the configuration is read, and
# /var/lib/slotgate is where `slotgate keys` writes.
RUN python -m pip uninstall -q -y --root-user-action=ignore pip \
 && groupadd --gid 10001 slotgate \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/slotgate --shell /usr/sbin/nologin slotgate \
 && install -d -o 10001 -g 10001 -m 0755 /etc/slotgate /var/lib/slotgate

COPY --from=build /opt/slotgate /opt/slotgate

ENV PATH=/opt/slotgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    SLOTGATE_CONFIG=/etc/slotgate/slotgate.yaml

USER 10001:10001
WORKDIR /var/lib/slotgate
EXPOSE 8088

# Alive, not ready: a gateway whose engines are all down is healthy, and restarting it would not help. No shell and no
# curl; http.client, because urllib would ask a proxy of the environment. With `listen.tls`, give another one.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
  CMD ["python", "-S", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8088, timeout=4); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]

# The first TERM drains for up to `drain_s` seconds: give `docker stop --time` more than that.
STOPSIGNAL SIGTERM
ENTRYPOINT ["slotgate"]
CMD ["serve"]
