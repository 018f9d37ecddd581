# The gateway and the replay UI in one image. CPU by default; for CUDA build with
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/venv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gateway gateway
COPY logs logs
COPY alerts alerts
COPY replay_ui replay_ui
RUN /opt/venv/bin/python -m pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} -c constraints.txt ".[otel]"

FROM python:${PYTHON}-slim
# The int8 kernels are compiled for the machine's own processor at the first start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home tokentape \
    && mkdir /data /cache /share \
    && chown tokentape /data /cache /share
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=PASSIVE \
    GOMP_SPINCOUNT=0 \
    TOKENTAPE_CACHE=/cache \
    TOKENTAPE_LOGS_DATA_DIR=/data
USER tokentape
VOLUME ["/data", "/cache"]
EXPOSE 8000 8501
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokentape"]
CMD ["serve", "--preset", "qwen-coder", "--host", "0.0.0.0", "--port", "8000", "--no-ui"]
