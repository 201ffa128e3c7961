// Talking to the server: JSON, server-sent events, and errors as sentences for a person.
import { useEffect, useRef, useState } from "./html.js";

const TOKEN = "thalweg-token";
const NOTHING = { key: null, data: null, error: null, asked: null };

export class ServerError extends Error {
  constructor(message, { code = "", field = "", status = 0, wait = 0 } = {}) {
    super(message);
    Object.assign(this, { code, field, status, wait });
  }
}

export function giveToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

function headers(more) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

// Fields of a request mean nothing to a person who types a word.
function plainly(message) {
  const text = message.replace(/^inputs?(\[\d+\])?:\s*/, "").replace(/^inputs?(\[\d+\])?(?=\s)/, "This text");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

async function complaint(response) {
  let said;
  try {
    said = (await response.json()).error;
  } catch {
    said = null;
  }
  const wait = Number(response.headers.get("Retry-After")) || 0;
  const message = plainly(said?.message || `The server answered with status ${response.status}.`);
  return new ServerError(message, { ...said, status: response.status, wait });
}

// One request: {path, body?, type?, signal?}; a plain object as body is sent as JSON. A busy server is asked again.
async function send({ path, body, type, method }, signal, patience = 3) {
  const json = body !== undefined && !type;
  let response;
  try {
    response = await fetch(path, {
      method: method || (body === undefined ? "GET" : "POST"),
      headers: headers(json ? { "Content-Type": "application/json" } : type ? { "Content-Type": type } : {}),
      body: json ? JSON.stringify(body) : body,
      signal,
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ServerError("The server does not answer. It may have been stopped; start it again and try once more.");
  }
  if (response.ok) return response;
  const problem = await complaint(response);
  if (problem.status !== 429 || patience === 0) throw problem;
  await new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(problem.wait || 1, 10)));
  signal?.throwIfAborted();
  return send({ path, body, type, method }, signal, patience - 1);
}

export async function ask(request, signal) {
  return (await send(request, signal)).json();
}

// Server-sent events of a GET or POST, as [{event, data}]; `EventSource` can neither post nor carry a token.
export async function* events(request, signal) {
  const response = await send(request, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    text += done ? "\n\n" : value.replaceAll("\r", "");
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const message = parseEvent(text.slice(0, end));
      if (message) yield message;
    }
    if (done) return;
  }
}

function parseEvent(block) {
  const lines = block.split("\n");
  const of = (name) =>
    lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trim());
  const data = of("data").join("\n");
  return data ? { event: of("event")[0] || "message", data: JSON.parse(data) } : null;
}

// The answer to a request that changes as a person types: waits for a pause, drops answers to what has since changed,
// and keeps the last good answer (`data`, with the request it answers) meanwhile. A null request asks nothing. It is
// `waiting` from the moment that the request is another one.
export function useAnswer(request, pause = 150) {
  const [again, setAgain] = useState(0);
  const [found, setFound] = useState(NOTHING);
  const first = useRef(true);
  const key = request && `${again} ${JSON.stringify(request)}`;
  useEffect(() => {
    if (!request) {
      setFound(NOTHING);
      return undefined;
    }
    const stop = new AbortController();
    const timer = setTimeout(
      async () => {
        try {
          const data = await ask(request, stop.signal);
          if (!stop.signal.aborted) setFound({ key, data, error: null, asked: request });
        } catch (error) {
          if (!stop.signal.aborted) setFound((last) => ({ ...last, key, error }));
        }
      },
      first.current ? 0 : pause,
    );
    first.current = false;
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [key]);
  return { ...found, waiting: key !== null && found.key !== key, retry: () => setAgain(again + 1) };
}
