// Components are functions that return `html` templates: Preact draws them, htm reads the templates.
import htm from "../vendor/htm.mjs";
import { h } from "../vendor/preact.mjs";

export { render } from "../vendor/preact.mjs";
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.mjs";

export const html = htm.bind(h);
