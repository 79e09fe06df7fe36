// A stage in another language: no job generates more than MAX_TOKENS tokens. It knows Penstock by its wire alone.
//
//   export PENSTOCK_PIPELINE=validate,cap,queue,batch,infer,stream
//   penstock serve MODEL &
//   NATS_URL=$(cat ~/.local/state/penstock/nats-url) MAX_TOKENS=100 node cap.mjs

import { AckPolicy, jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect, nanos } from "@nats-io/transport-node";
import { LosslessNumber, parse, stringify } from "lossless-json"; // a seed has 64 bits, a number in JavaScript 53

// <namespace>_STAGE_<name>_<priority>; Penstock makes them, for the name stands in its pipeline
const STREAMS = ["HIGH", "NORMAL", "LOW"].map((priority) => `PENSTOCK_STAGE_CAP_${priority}`);
const limit = Number(process.env.MAX_TOKENS ?? 100);

// The client does not read credentials from a URL.
const { host, username, password } = new URL(process.env.NATS_URL ?? "nats://127.0.0.1:4222");
const credentials = password ? { user: username, pass: password } : { token: username };
const connection = await connect({ servers: host, ...credentials, name: "cap", maxReconnectAttempts: -1 });
const js = jetstream(connection);

// One stream a priority, so that no job waits behind one of a lower. Copies of this program share the work through these
// consumers. One that dies gives up its jobs after `ack_wait`.
const manager = await jetstreamManager(connection);
const lanes = await Promise.all(
  STREAMS.map(async (stream) => {
    await manager.consumers.add(stream, {
      durable_name: "cap",
      ack_policy: AckPolicy.Explicit,
      ack_wait: nanos(5_000),
    });
    return (await js.consumers.get(stream, "cap")).consume({ max_messages: 64 });
  }),
);
for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => lanes.forEach((messages) => messages.close()));
console.log(`cap: no job generates more than ${limit} tokens`);

async function work(messages) {
  for await (const message of messages) {
    try {
      const job = parse(message.string());
      for (const name of ["max_tokens", "min_tokens"]) {
        if (job.params[name] > limit) job.params[name] = new LosslessNumber(`${limit}`);
      }
      // All headers stay, the message id among them: published twice after a crash, a job is stored once.
      const [next, ...rest] = message.headers.get("Penstock-Next").split(" ");
      message.headers.set("Penstock-Next", rest.join(" "));
      await js.publish(next, stringify(job), { headers: message.headers });
      message.ack();
    } catch (error) {
      console.error(`cap: job ${message.seq} waits for another try: ${error.message}`);
      message.nak(1_000);
    }
  }
}

await Promise.all(lanes.map(work));
await connection.drain();
