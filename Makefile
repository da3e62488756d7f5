.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: help
