// What the page shows is written in the address: `#try?words=cat&width=3`. A link restores a view; a tab that is left
// keeps its words until it is seen again.
import { useEffect, useState } from "./html.js";

const kept = {};

function read() {
  const [, tab, query] = /^#?([a-z]*)\??(.*)$/s.exec(location.hash);
  return { tab, words: Object.fromEntries(new URLSearchParams(query)) };
}

export function addressOf(tab, words) {
  const query = new URLSearchParams(Object.entries(words).filter(([, word]) => word !== "" && word != null));
  return `#${tab}${String(query) && `?${query}`}`;
}

// Safari takes a hundred addresses in ten seconds, as many as a slider can make, and throws at the next: that one is
// written a moment later.
let late = 0;
function write(address) {
  clearTimeout(late);
  try {
    history.replaceState(null, "", address);
  } catch {
    late = setTimeout(write, 1000, address);
  }
}

// The tab, its words, how to go to a tab, and how to change some words (null takes one away).
export function usePlace(tabs) {
  const here = () => {
    const found = read();
    return tabs.includes(found.tab) ? found : { tab: tabs[0], words: {} };
  };
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const follow = () => {
      clearTimeout(late);
      setPlace(here());
    };
    addEventListener("hashchange", follow);
    addEventListener("popstate", follow);
    return () => {
      removeEventListener("hashchange", follow);
      removeEventListener("popstate", follow);
    };
  }, []);
  kept[place.tab] = place.words;
  const go = (tab) => {
    const words = kept[tab] || {};
    clearTimeout(late);
    history.pushState(null, "", addressOf(tab, words));
    setPlace({ tab, words });
  };
  const change = (some) => {
    const words = { ...kept[place.tab], ...some };
    for (const name of Object.keys(words)) if (words[name] == null) delete words[name];
    kept[place.tab] = words;
    write(addressOf(place.tab, words));
    setPlace({ tab: place.tab, words });
  };
  return { ...place, go, change };
}

// Text that is long for an address, squeezed: deflate, then base64 with the letters that addresses leave alone.
export async function squeeze(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export async function unsqueeze(letters) {
  const raw = atob(letters.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(raw, (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
}
