# Two images from one source: `web` (web and controller, no torch) and `worker` (a GPU host, no Django).
FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
RUN useradd --create-home meshboard && install -d -o meshboard /var/lib/meshboard
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY contracts contracts
COPY planner planner

FROM base AS web
COPY manage.py ./
COPY webapp webapp
COPY jobs jobs
COPY templates templates
RUN pip install -c requirements.lock '.[web]'
USER meshboard
RUN MESHBOARD_SECRET_KEY=only-for-this-step MESHBOARD_STATE_DIR=/var/lib/meshboard \
    python manage.py collectstatic --no-input --verbosity 0

FROM base AS worker
COPY workers workers
RUN pip install -c requirements.lock '.[worker]'
USER meshboard
