# Two images from one source: `web` (web and controller, no torch) and `worker` (a GPU host, no Django).
# docs/howto/deploy.md shows how to pin the base image by its digest.
FROM python:3.11.14-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
RUN useradd --create-home meshboard && install -d -o meshboard /var/lib/meshboard
COPY pyproject.toml setup.py VERSION requirements.lock README.md LICENSE ./
COPY contracts contracts
COPY planner planner

FROM base AS web
# ssh reaches the Slurm commands, which this image does not contain.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-client && rm -rf /var/lib/apt/lists/*
COPY manage.py ./
COPY webapp webapp
COPY jobs jobs
COPY templates templates
RUN pip install -c requirements.lock '.[web]'
# Static files stay in the image. A volume would keep the files of an older image.
ENV MESHBOARD_STATIC_ROOT=/srv/static
RUN MESHBOARD_SECRET_KEY=only-for-this-step-0123456789-0123456789-0123456789 MESHBOARD_REDIS_URL=redis://127.0.0.1 \
    python manage.py collectstatic --no-input --verbosity 0
# The web process serves the documentation at /docs. The build tools stay in the build stage.
COPY client client
COPY manual manual
COPY docs docs
RUN pip install -c requirements.lock --target /tmp/build httpx mkdocs pyyaml typer && \
    PYTHONPATH=/tmp/build python -m manual && \
    rm -rf /tmp/build
USER meshboard

FROM base AS worker
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap libjemalloc2 && rm -rf /var/lib/apt/lists/*
COPY workers workers
RUN pip install -c requirements.lock '.[worker]'
USER meshboard
