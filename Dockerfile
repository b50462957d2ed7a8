# docker build -t workhorse --build-arg TORCH_INDEX=ADDRESS .        (docs/serving.md)
FROM python:3.11-slim

# The native operators are compiled for the CPU on which they run.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 workhorse \
    && install --directory --owner 1000 /home/workhorse/.cache

ARG TORCH_INDEX
COPY pyproject.toml README.md LICENSE constraints.txt /workhorse/
COPY src /workhorse/src
RUN pip install --no-cache-dir --constraint /workhorse/constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "/workhorse[serve]"

USER 1000
EXPOSE 8000
# The port opens when the model is loaded.
HEALTHCHECK --start-period=10m CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=3)"]
ENTRYPOINT ["workhorse", "serve", "/model", "--host", "0.0.0.0"]
