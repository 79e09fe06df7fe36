"""How what travels becomes bytes, and how others read it: JSON, protobuf, AsyncAPI, headers, merge patches."""
