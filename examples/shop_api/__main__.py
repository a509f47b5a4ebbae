"""Serve the shop on 127.0.0.1: `python -m examples.shop_api [PORT]`."""

from __future__ import annotations

import sys

import uvicorn
from examples.shop_api.app import create_app

if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
