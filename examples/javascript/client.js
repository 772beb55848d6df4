// Streams an answer from Outrider, and goes on at another orchestrator where a connection is lost.
//
//   npm ci
//   node client.js 127.0.0.1:7400,127.0.0.1:7410 "Why is the sky blue?"
//
// OUTRIDER_API_KEY is shown if it is set, and OUTRIDER_CA is a file with the CA of orchestrators that speak TLS.

import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { setTimeout as pause } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const MAX_TRIES_IN_VAIN = 30;
const LONGEST_PAUSE_MS = 2000;
// UNAVAILABLE: that orchestrator is gone, or stops. CANCELLED, which we have not caused: it stopped at that very moment.
// ABORTED: a late call of our own took the session over. RESOURCE_EXHAUSTED: there is no room yet.
const PASSING = new Set([grpc.status.UNAVAILABLE, grpc.status.CANCELLED]);
const PASSING_ONCE_BEGUN = new Set([...PASSING, grpc.status.ABORTED, grpc.status.RESOURCE_EXHAUSTED]);

// Positions and token ids are int64 on the wire and below 2^31, so that numbers hold them; a seed is a uint64, and may
// be given as a string.
const definition = loader.loadSync('outrider/v1/generation.proto', {
  includeDirs: [PROTOS], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).outrider.v1;

/** Returns one stub per address. */
export function connect(addresses) {
  const ca = process.env.OUTRIDER_CA;
  const credentials = ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure();
  return addresses.map((address) => new GenerationService(address, credentials));
}

/** Yields the events of a generation to its end, in as many calls as it takes: no token twice, none missing. */
export async function* generate(stubs, request) {
  const metadata = new grpc.Metadata();
  if (process.env.OUTRIDER_API_KEY) metadata.set('authorization', `Bearer ${process.env.OUTRIDER_API_KEY}`);
  let session = '', position = 0, inVain = 0;
  for (let at = 0; ; at += 1) {
    const stub = stubs[at % stubs.length];
    const call = session
      ? stub.Resume({ session_id: session, next_position: position }, metadata)
      : stub.Generate(request, metadata);
    try {
      for await (const { event } of call) {
        if (event.event === 'started') {
          if (session) continue; // of a resumed stream
          session = event.started.session_id;
          position = event.started.prompt_len;
        } else if (event.event === 'chunk') {
          position += event.chunk.token_ids.length;
          if (event.chunk.token_ids.length) inVain = 0;
        }
        yield event;
        if (event.event === 'finished') return;
      }
    } catch (error) {
      inVain += 1;
      const passing = session ? PASSING_ONCE_BEGUN : PASSING;
      if (!passing.has(error.code) || inVain >= MAX_TRIES_IN_VAIN) throw error;
      console.error(`[going on elsewhere: ${error.details || error.message}]`);
      // The other addresses are tried at once; a pause is for those that have failed already.
      if (inVain % stubs.length === 0) await pause(Math.min(LONGEST_PAUSE_MS, 50 * 2 ** (inVain / stubs.length)));
    } finally {
      call.cancel();
    }
  }
}

async function main() {
  const [addresses, prompt, maxTokens = '100'] = process.argv.slice(2);
  if (!addresses || !prompt) throw new Error('usage: node client.js ADDRESS[,ADDRESS] PROMPT [MAX_TOKENS]');
  const stubs = connect(addresses.split(','));
  const request = {
    chat: { messages: [{ role: 'user', content: prompt }] },
    max_tokens: Number(maxTokens),
    sampling: { temperature: 0 },
    // By this name the request is known when it is asked again because its first answer was lost.
    request_id: randomUUID(),
  };
  for await (const event of generate(stubs, request)) {
    if (event.event === 'chunk') process.stdout.write(event.chunk.text);
    if (event.event === 'notice') console.error(`[${event.notice.reason}] ${event.notice.text}`);
    if (event.event === 'finished') {
      const { reason, usage } = event.finished;
      console.error(`\n[${reason}, ${usage.completion_tokens} tokens]`);
    }
  }
  process.stdout.write('\n');
  stubs.forEach((stub) => stub.close());
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  main().catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  });
}
