// What of VS Code is beside the web view of a notebook: the connection to the kernel, cells, and their outputs.
//
// As Microsoft's extension does (https://github.com/microsoft/vscode-jupyter, of which src/notebooks/controllers/ipywidgets
// and src/webviews/extension-side are meant), it hands all that the kernel says to the web view as it came, sends what
// the web view has for the kernel, and asks it to show an output once the kernel has said what is to be seen.
import { ServerConnection } from "@jupyterlab/services";
import { KernelConnection } from "@jupyterlab/services/lib/kernel/default";
import { deserialize } from "@jupyterlab/services/lib/kernel/serialize";

const VIEW = "application/vnd.jupyter.widget-view+json";
const frame = document.querySelector("iframe");
const outputs = new Map();  // model ids by the ids of outputs
const saved = [];  // what a person has asked to save, by a click on a link
let socket = null, made = 0;

const toView = (message) => frame.contentWindow.postMessage(message, location.origin);

class Socket extends WebSocket {
  constructor(url, protocols) {
    super(url, protocols);
    socket = this;
    this.addEventListener("message", (event) => toView({ type: "said", data: event.data }));
  }
}

const kernel = new KernelConnection({
  model: { id: new URLSearchParams(location.search).get("kernel"), name: "python3" },
  serverSettings: ServerConnection.makeSettings({ baseUrl: location.origin, WebSocket: Socket }),
});
kernel.registerCommTarget("jupyter.widget", () => {});  // for the web view to answer

let viewIsThere = null;
const ready = Promise.all([kernel.info, new Promise((resolve) => { viewIsThere = resolve; })]).then(() => {
  const { clientId, username, model } = kernel;
  toView({ type: "kernel", clientId, username, model, protocol: socket.protocol });
  window.notebook.isReady = true;
});
const fromView = {
  ready: () => viewIsThere(),
  say: ({ data }) => {
    const message = typeof data === "string" ? JSON.parse(data) : deserialize(data, socket.protocol);
    if (message.channel === "control") kernel.sendControlMessage(message);
    else kernel.sendShellMessage(message);
  },
  save: ({ name, data }) => saved.push({ name, data }),
};
window.addEventListener("message", (event) => fromView[event.data.type]?.(event.data));

const seen = (message) => {
  const { data, transient } = message.content;
  if (["display_data", "execute_result"].includes(message.header.msg_type) && data[VIEW]) {
    const output = transient?.display_id || `output-${made++}`;
    outputs.set(output, data[VIEW].model_id);
    toView({ type: "show", output, model: data[VIEW] });
  }
};
// what changes an output makes VS Code show it again, in the same place
kernel.iopubMessage.connect((_, message) => {
  const { content, header } = message;
  if (header.msg_type === "update_display_data" && outputs.has(content.transient.display_id) && content.data[VIEW]) {
    toView({ type: "show", output: content.transient.display_id, model: content.data[VIEW] });
  }
});

window.notebook = {
  saved,
  outputs: () => [...outputs.keys()],
  isReady: false,
  /** What the cell that was begun last has ended with, once it has: "ok" or an error. */
  ended: null,
  begin(code) {
    this.ended = null;
    const future = kernel.requestExecute({ code }, false);
    future.onIOPub = seen;
    future.done.then(({ content }) => {
      this.ended = content.status === "ok" ? "ok" : `${content.ename}: ${content.evalue}`;
    });
  },
  /** Take an output out of the page and show it elsewhere, as after scrolling far away and back. */
  again(output) {
    toView({ type: "hide", output });
    toView({ type: "show", output, model: { version_major: 2, version_minor: 0, model_id: outputs.get(output) } });
  },
};
