"""Ask over gRPC, and go on reading wherever the connection or the server breaks off.

penstock serve --grpc-port 50051 &
penstock schema proto > penstock.proto
python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. penstock.proto
python deploy/examples/grpc_client.py 127.0.0.1:50051 MODEL "Hello!"
"""

from __future__ import annotations

import json
import os
import sys

import grpc

sys.path.insert(0, os.getcwd())  # where protoc wrote the two modules

import penstock_pb2 as pb
from penstock_pb2_grpc import PenstockStub


def main(address: str, model: str, prompt: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    key = os.environ.get("PENSTOCK_KEY")
    options = {"metadata": [("authorization", f"Bearer {key}")] if key else [], "wait_for_ready": True}
    with grpc.insecure_channel(address) as channel:
        stub = PenstockStub(channel)
        events = stub.Submit(pb.SubmitRequest(body=json.dumps(body), resumable=True), **options)
        request, last = "", ""
        while True:
            try:
                for event in events:
                    request, last = request or event.accepted.request, event.id
                    print(event.token.text, end="", flush=True)
                break
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or not request:
                    raise
            events = stub.Follow(pb.FollowRequest(request=request, after=last), **options)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
