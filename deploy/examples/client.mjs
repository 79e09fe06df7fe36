// node client.mjs MODEL PROMPT, with the broker's URL in NATS_URL
import { jetstream } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";

const { host, username } = new URL(process.env.NATS_URL); // the client does not read the token from a URL
const [model, content] = process.argv.slice(2);
const connection = await connect({ servers: host, token: username });
const js = jetstream(connection);

const id = crypto.randomUUID(); // the same id is the same request: publishing it again is harmless
const job = { id, bridge: "example", body: { model, messages: [{ role: "user", content }] } };
const events = await js.consumers.get("PENSTOCK_EVENTS", { filter_subjects: `penstock.events.default.example.${id}` });
await js.publish("penstock.jobs.normal.default", JSON.stringify(job), { msgID: id });
for await (const message of await events.consume()) {
  const event = message.json();
  if (event.type === "token") process.stdout.write(event.text);
  if (event.type === "failed" || event.type === "expired") console.error(event.error.message);
  if (["done", "failed", "cancelled", "expired"].includes(event.type)) break;
}
console.log();
await connection.close();
