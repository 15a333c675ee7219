// What the SDKs for Node make of the gateway's answers, as one JSON document. Run by test_sdk_node.py.
const OpenAI = require('openai');
const Anthropic = require('@anthropic-ai/sdk');

const { BASE: base, KEY: apiKey } = process.env;
const openai = new OpenAI.OpenAI({ baseURL: `${base}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic.Anthropic({ baseURL: base, apiKey, maxRetries: 0 });
const messages = [{ role: 'user', content: 'hello' }];

async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, id: error.requestID };
  }
  return { name: 'none' };
}

async function main() {
  const chat = await openai.chat.completions.create({ model: 'm', messages });
  let streamed = '';
  const chunks = await openai.chat.completions.create({ model: 'm', messages, stream: true });
  for await (const chunk of chunks) streamed += chunk.choices[0]?.delta?.content ?? '';
  const response = await openai.responses.create({ model: 'm', input: 'hello' });
  const models = [];
  for await (const model of openai.models.list()) models.push(model.id);
  const message = await anthropic.messages.create({ model: 'm', max_tokens: 5, messages });
  const stream = anthropic.messages.stream({ model: 'm', max_tokens: 5, messages });
  const final = await stream.finalMessage();
  const counted = await anthropic.messages.countTokens({ model: 'm', messages });
  const listed = [];
  for await (const model of anthropic.models.list()) listed.push(model.id);
  const wrong = new OpenAI.OpenAI({ baseURL: `${base}/v1`, apiKey: 'sk-sg-wrong', maxRetries: 0 });
  return {
    chat: chat.choices[0].message.content,
    streamed,
    response: response.output_text,
    models,
    message: message.content[0].text,
    final: final.content[0].text,
    counted: counted.input_tokens,
    listed,
    unauthorized: await refusal(wrong.chat.completions.create({ model: 'm', messages })),
    unknown: await refusal(openai.chat.completions.create({ model: 'mm', messages })),
    anthropicUnknown: await refusal(
      anthropic.messages.create({ model: 'mm', max_tokens: 5, messages }),
    ),
  };
}

main().then(
  (found) => console.log(JSON.stringify(found)),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
